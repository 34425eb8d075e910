"""What services say to each other and where: messages, their wire format, subjects, streams, and
keys of the buckets.

Nothing here imports torch, and only `streams` uses a transport.
"""
