"""The wire: OpenAI's protocols over ASGI, one folder per protocol; `app.asgi` makes the application."""
