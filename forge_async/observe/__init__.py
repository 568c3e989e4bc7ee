"""What a run tells: metrics, sinks, spans, the report."""
