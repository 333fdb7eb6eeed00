"""Tools of chats: which calls a request asks for, and calls out of what a model writes."""
