"""OpenAI's requests and responses as types, with their bounds. Must not know: FastAPI, the engine, tokens' meaning."""
