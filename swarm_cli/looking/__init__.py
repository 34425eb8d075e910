"""Which swarm a command looks at: a running one's servers, those of the run that comes next, or a
copy of what the server of an ended run had stored. What is shown of it lives in `observe`,
`dashboard`, `rollouts` and `trace`.
"""
