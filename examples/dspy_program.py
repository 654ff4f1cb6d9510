"""A DSPy program: three questions are answered in parallel, then one answer is made of them.

`engine="litellm"` matters: DSPy's own engine opens sockets itself, past every HTTP client, and its
calls would carry no tags.
"""

from __future__ import annotations

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or LiteLLM fetches it at import

import dspy

import autellix

TOPICS = ("the sun", "the moon", "the sea")


class LM(dspy.LM):
    """A model whose engine enforces a JSON schema, which LiteLLM's list of models cannot know."""

    supports_response_schema = True


class Almanac(dspy.Module):
    """Facts, and a line made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fact = dspy.Predict("topic -> fact")
        self.line = dspy.Predict("facts -> line")

    @autellix.session("almanac")
    def forward(self, topics: tuple[str, ...]) -> dspy.Prediction:
        """Answer side by side, then once more."""
        # Without timeout=0, what takes 120 s is asked a second time, on a busy server too.
        parallel = dspy.Parallel(num_threads=len(topics), timeout=0, disable_progress_bar=True)
        found = parallel([(self.fact, {"topic": topic}) for topic in topics])
        return self.line(facts="\n".join(part.fact for part in found))


if __name__ == "__main__":
    name = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    lm = LM(f"openai/{name}", engine="litellm", cache=False, max_tokens=48, temperature=0)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        print("dspy:", " ".join(Almanac()(TOPICS).line.split())[:80])
