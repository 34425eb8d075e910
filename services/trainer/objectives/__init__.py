"""Policy-gradient objectives as pure functions over tensors: one file each, found by name through
`shared.registry.OBJECTIVES`.

No model, optimizer or configuration file is known here; `services.trainer.gradient.update` puts
these to work. The objectives, `base` and `config` import without torch, so that a configuration can
be checked against what an objective says of itself.
"""
