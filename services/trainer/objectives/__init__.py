"""Policy-gradient objectives as pure functions over tensors: one file each, found by name through
`shared.registry.OBJECTIVES`.

Nothing here depends on a model, optimizer or configuration file; `services.trainer.gradient.update`
applies the objectives. The objectives, `base` and `config` can be imported without torch, so that a
configuration can be checked against an objective's declarations.
"""
