"""Text of requests and answers: chat templates, prompts, tools, constrained answers."""
