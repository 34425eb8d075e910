"""A node's identity and permissions: keys and signatures, the roster, and the permissions of each
role on the server.
"""
