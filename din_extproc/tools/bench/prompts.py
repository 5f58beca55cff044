"""The prompts of every comparison: the same ones each time, of mixed lengths, none the beginning of another."""

_TOPICS = ("a river", "an old bridge", "the tides", "a night train", "bread", "a violin", "snow", "a lighthouse")
_ASKED = ("Describe", "Explain", "Tell a story about", "List what is known of", "Compare with something else")
_LENGTHS = (1, 4, 12, 30)
"""How often the topic is dwelt on: 20 to 300 tokens."""


def prompt(number: int) -> str:
    """One of them. `number`: from 0; equal numbers give equal prompts."""
    topic = _TOPICS[number % len(_TOPICS)]
    more = f"Think of {topic} by day and by night. " * _LENGTHS[number % len(_LENGTHS)]
    return f"{number}. {_ASKED[number % len(_ASKED)]} {topic}. {more}Answer at length."
