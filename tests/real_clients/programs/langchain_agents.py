"""Two LangChain models made by relaykv.clients, the second one streamed."""

from __future__ import annotations

import uuid

from relaykv.clients.langchain_client import chat_model, num_cached

session = f"langchain-{uuid.uuid4().hex[:8]}"
llm = chat_model(session, "SmolLM2-135M-Instruct", max_tokens=70, temperature=0, stream_usage=True)
draft = llm.invoke([("system", "You write product texts."), ("human", "Describe a desk lamp.")])
task = f"A colleague wrote:\n\n{draft.content}\n\nReview it."
review = None
for chunk in llm.stream([("system", "You review product texts for a shop."), ("human", task)]):
    review = chunk if review is None else review + chunk
assert review is not None
assert num_cached(draft) == 0
assert num_cached(review) >= 32, review.usage_metadata
print(review.content)
