"""Moves messages: one interface (`base`) with two implementations, NATS JetStream (`nats`) and
in-memory (`memory`).

Both use the other modules here: large payloads as chunks (`blobs`, `reference`, `seal`), the names
of buckets (`keys`), deadlines. Nothing here knows the contents of messages;
`shared.contracts.streams` creates a node's streams.
"""
