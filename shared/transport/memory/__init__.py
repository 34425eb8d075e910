"""The transport without a server: `transport` and its parts, over `server`, which keeps JetStream's
rules as plain state.
"""
