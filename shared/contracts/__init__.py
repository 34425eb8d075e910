"""The messages that services exchange: their structs and wire format, and the names and limits of
the subjects, streams and bucket keys that carry them.

Nothing here imports torch, and only `streams` uses a transport.
"""
