"""Data that ships with the server: serving defaults (serve.toml) and known models (models/*.toml). Holds no code."""
