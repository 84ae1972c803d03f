"""Several daemons as one: generation spread over them, and refits of all or none."""
