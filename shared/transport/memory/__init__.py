"""The in-memory transport: `transport` and its parts, over `server`, which implements JetStream's
rules as plain state.
"""
