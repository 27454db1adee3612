"""A component that asks about three files at once, in a pool of threads."""

from concurrent.futures import ThreadPoolExecutor

import lightning
from openai import OpenAI

client = OpenAI()


def ask(text: str) -> str:
    reply = client.chat.completions.create(model="gpt-5-mini", messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content or ""


if __name__ == "__main__":
    with lightning.component("reviewer"), ThreadPoolExecutor(3) as pool:
        print(list(pool.map(ask, ["Review a.py", "Review b.py", "Review c.py"])))
    with lightning.component("summarizer"):
        print(ask("Put it together."))
