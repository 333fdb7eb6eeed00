"""The load client: a workload's sessions against any OpenAI-compatible server, and one record per request."""
