"""A server of episodes: OpenAI's chat completions, MCP and a page, over one engine.

Reading order:

1. `owner`: the one thread that steps the engine, and the queue before it.
2. `service`: what clients can ask: an episode about a video, or one completion of the model alone.
3. `files`: uploads, pictures in requests, and the folder of videos that clients may name.
4. `chat_request`: what clients may ask, in the words of OpenAI's API. `chat` begins it, and
   `chat_reply` says what became of it.
5. `app`: the routes and limits, behind `guard`. `tools`: the same episodes for MCP.
"""
