"""A body to engine requests: schema, messages, prompts, plan, grammars, tools."""
