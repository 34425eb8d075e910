"""The transport over NATS JetStream: `transport` combines the other modules. Only this package
imports a NATS client.
"""
