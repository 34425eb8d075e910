"""Reads the committed rules and dashboards, and writes the pages of metrics and of the border's
checks from the code. Nothing here runs in a service.
"""
