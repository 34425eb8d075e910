"""What people on call look at, as code: dashboards, recording rules and alerts, rendered to files
for Grafana and Prometheus.

Nothing here runs in a service; the metrics themselves are declared where they are counted.
"""
