"""The four processes of a node, one folder each; each starts with `python -m services.<name>`.

They meet only in messages: no service imports another.
"""
