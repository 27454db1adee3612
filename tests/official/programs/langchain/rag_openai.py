"""Retrieval with OpenAI's embeddings, and an answer from what was found."""

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

store = InMemoryVectorStore(OpenAIEmbeddings(model="text-embedding-3-small", check_embedding_ctx_length=False))
store.add_documents([Document("Paris is the capital of France."), Document("The Nile is a river.")])
prompt = ChatPromptTemplate.from_template("Answer from this:\n{context}\n\nQuestion: {question}")
chain = (
    {
        "context": store.as_retriever(search_kwargs={"k": 1}) | (lambda found: found[0].page_content),
        "question": RunnablePassthrough(),
    }
    | prompt
    | ChatOpenAI(model="gpt-5-mini")
    | StrOutputParser()
).with_config(run_name="rag")

if __name__ == "__main__":
    print(chain.invoke("What is the capital of France?"))
