"""How messages move: one interface (`base`) with two implementations, NATS JetStream (`nats`) and
in-memory (`memory`).

What both share lies beside them: large payloads as chunks (`blobs`, `reference`, `seal`), where
buckets lie (`keys`), deadlines. What is said in the messages is not known here; set-up of a node's
streams is in `shared.contracts.streams`.
"""
