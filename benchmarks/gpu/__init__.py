"""`python -m benchmarks.gpu`, `make gpu-check`: checks what only a GPU can show, in about twelve
minutes on one card, and writes `var/gpu-check.md`. `docs/speed.md` tells what it found here.

Every part takes the device as an argument, so `tests/integration/test_gpu_check.py` can run all of
them on the CPU at a small size.
"""
