"""What is counted, as Prometheus and OpenTelemetry want it."""
