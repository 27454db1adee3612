"""The first flow of CrewAI's documentation: two steps that call LiteLLM."""

from typing import Any

from crewai.flow.flow import Flow, listen, start
from litellm import completion


class ExampleFlow(Flow[Any]):
    model = "gpt-4o-mini"

    @start()
    def generate_city(self) -> str:
        response = completion(
            model=self.model,
            messages=[{"role": "user", "content": "Return the name of a random city in the world."}],
        )
        random_city = response["choices"][0]["message"]["content"]
        self.state["city"] = random_city
        return str(random_city)

    @listen(generate_city)
    def generate_fun_fact(self, random_city: str) -> str:
        response = completion(
            model=self.model,
            messages=[{"role": "user", "content": f"Tell me a fun fact about {random_city}"}],
        )
        return str(response["choices"][0]["message"]["content"])


if __name__ == "__main__":
    print(ExampleFlow().kickoff())
