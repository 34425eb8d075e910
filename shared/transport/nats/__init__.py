"""The transport over NATS JetStream: `transport` puts together what the other modules do. Only here
is a NATS client imported.
"""
