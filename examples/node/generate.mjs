// Streams an answer over gRPC: `npm install && node generate.mjs [HOST:PORT] [PROMPT]`.
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address = "127.0.0.1:50051", prompt = "The capital of France is"] = process.argv.slice(2);
const protos = path.join(path.dirname(fileURLToPath(import.meta.url)), "..", "..", "protos");

// Request ids have 63 bits: JavaScript's numbers do not, so they are strings here.
const definition = protoLoader.loadSync("isthmus/v1/inference_service.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).isthmus.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

// For routers that ask for an API key.
const metadata = new grpc.Metadata();
if (process.env.ISTHMUS_API_KEY) metadata.set("authorization", `Bearer ${process.env.ISTHMUS_API_KEY}`);

const call = client.Generate({ prompt, max_tokens: 16 }, metadata, { deadline: Date.now() + 60_000 });
call.on("data", (part) => process.stdout.write(part.text));
call.on("end", () => {
  process.stdout.write("\n");
  client.close();
});
call.on("error", (error) => {
  // The typed reason is in the metadata: grpc-status-details-bin, a google.rpc.Status.
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
});
