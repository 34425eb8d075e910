"""Who a node is and what it may do: keys and signatures, the roster, and the permissions of each
role on the server.
"""
