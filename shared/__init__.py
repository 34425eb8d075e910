"""Code that every service needs: messages, subjects, configuration, transport, tasks, policy store
and service runtime.

Code that only one service needs stays in that service's folder. Nothing here imports a service, and
only `shared.model` imports torch.
"""
