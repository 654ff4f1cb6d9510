"""The lab: traces, a simulator on vLLM's own scheduler, replay on live engines, reports."""
