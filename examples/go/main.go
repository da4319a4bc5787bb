// Streams an answer over gRPC: `./generate.sh && go run . [HOST:PORT] [PROMPT]`.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"isthmus.example/client/isthmusv1"
)

func main() {
	address, prompt := "127.0.0.1:50051", "The capital of France is"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	if err := generate(address, prompt); err != nil {
		// The typed reason is among the details: status.Convert(err).Details().
		fmt.Fprintf(os.Stderr, "%s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
}

func generate(address, prompt string) error {
	// Without TLS. With it: credentials/tls, and a certificate of the role "client" (docs/security.md).
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if key := os.Getenv("ISTHMUS_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	maxTokens := uint32(16)
	stream, err := isthmusv1.NewInferenceServiceClient(connection).Generate(ctx, &isthmusv1.InferenceServiceGenerateRequest{
		Input:     &isthmusv1.InferenceServiceGenerateRequest_Prompt{Prompt: prompt},
		MaxTokens: &maxTokens,
	})
	if err != nil {
		return err
	}
	for {
		part, err := stream.Recv()
		if err == io.EOF {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(part.GetText())
	}
}
