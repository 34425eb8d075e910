"""A run's numbers in the tools that people compare runs with: TensorBoard, Weights & Biases,
Trackio, or one from an installed package (docs/extend/tracker.md).

`metrics.jsonl` is the record; what is here shows it elsewhere, and no failure here changes
training.
"""
