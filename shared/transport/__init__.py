"""Moves messages: the interface (`base`), which loads no NATS client, NATS JetStream behind it
(`nats`), and large payloads as chunks (`blobs`).

Nothing here knows the contents of messages; `shared.contracts.streams` creates a node's streams.
"""
