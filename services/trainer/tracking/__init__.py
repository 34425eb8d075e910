"""Sends a run's numbers to the tools in which people compare runs: TensorBoard, Weights & Biases,
Trackio, or one from an installed package (docs/extend/tracker.md).

`metrics.jsonl` is the authoritative record. A failure here never changes training.
"""
