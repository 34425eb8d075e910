"""The calculator that comes with Swarm: `tools = ["calculator"]`."""

from shared.tasks.scorers import evaluate


def calculator(expression: str) -> str:
    """Compute an expression of whole numbers with + - * / and parentheses.

    Args:
        expression: what to compute, such as 12*34.
    """
    try:
        return str(evaluate(expression))
    except ZeroDivisionError:
        return "error: division by zero"
