"""Parts that other engines load: KV of theirs in a store of ours."""
