"""The engine's loop: it schedules requests, dispatches steps to a model runner, and returns tokens and text."""
