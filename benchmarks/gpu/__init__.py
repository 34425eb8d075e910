"""`python -m benchmarks.gpu`, `make gpu-check`: what only a GPU can show, in ten minutes on one
card, written to `docs/gpu.md`.

Every part takes the device as an argument: `tests/integration/test_gpu_check.py` runs all of them,
small, on the CPU.
"""
