"""OpenAI's Responses API: a chat with items in place of messages, kept on the server if the client wants it."""
