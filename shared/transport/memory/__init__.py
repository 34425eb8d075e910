"""The transport without a server: `transport` and its parts, over `server`, which implements
JetStream's rules as plain state.
"""
