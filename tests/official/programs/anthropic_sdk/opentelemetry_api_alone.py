"""Claude's own client, which brings `opentelemetry-api`, where nobody has installed the SDK of OpenTelemetry."""

import sys

sys.modules["opentelemetry.sdk"] = None  # as where it is not installed

import anthropic  # noqa: E402


def main() -> None:
    client = anthropic.Anthropic()
    for text in ("Hello!", "How are you?"):
        reply = client.messages.create(
            model="claude-sonnet-4-5", max_tokens=1024, messages=[{"role": "user", "content": text}]
        )
        print(reply.content)


if __name__ == "__main__":
    main()
