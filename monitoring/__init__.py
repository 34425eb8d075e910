"""Dashboards, recording rules and alerts as code, rendered to files for Grafana and Prometheus.

Nothing here runs in a service. Each metric is declared in the service that counts it.
"""
