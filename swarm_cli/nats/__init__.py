"""`swarm nats`: streams, the servers' configuration, accounts, and a watch over them."""
