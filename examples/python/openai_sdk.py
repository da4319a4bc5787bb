"""Streams a chat answer with OpenAI's SDK: `python openai_sdk.py [URL] [QUESTION]`."""

import os
import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "What is an isthmus?"

client = openai.OpenAI(base_url=url, api_key=os.environ.get("ISTHMUS_API_KEY", "unused"))
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=32,
    stream=True,
    # What OpenAI does not have goes into the body or the headers.
    extra_body={"schedule": "context_first"},
    extra_headers={"x-session-id": "example"},
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
