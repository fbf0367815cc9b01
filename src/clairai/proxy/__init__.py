"""The proxy: takes requests of OpenAI clients and a ring; gives the answers with their scores."""
