"""The wire between trainers and the refitd daemon: messages, frames, tensors, states and errors, without any I/O."""
