"""The prompts of all comparisons: always the same, of mixed lengths, none a prefix of another."""

_TOPICS = ("a river", "an old bridge", "the tides", "a night train", "bread", "a violin", "snow", "a lighthouse")
_OPENINGS = ("Describe", "Explain", "Tell a story about", "List what is known of", "Compare with something else")
_LENGTHS = (1, 4, 12, 30)
"""Repetitions of the topic: 20 to 300 tokens."""


def make_prompt(number: int) -> str:
    """Return a prompt. `number`: from 0; equal numbers give equal prompts."""
    topic = _TOPICS[number % len(_TOPICS)]
    more = f"Think of {topic} by day and by night. " * _LENGTHS[number % len(_LENGTHS)]
    return f"{number}. {_OPENINGS[number % len(_OPENINGS)]} {topic}. {more}Answer at length."
