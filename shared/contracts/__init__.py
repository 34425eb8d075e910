"""What services say to each other and where: messages, their wire format, subjects, streams, and
keys of the buckets.

Nothing here knows torch, and nothing but `streams` knows a transport.
"""
